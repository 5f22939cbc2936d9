from fl_dispatch.selection.checks import *
