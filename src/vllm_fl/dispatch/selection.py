from fl_dispatch.selection.decision import *
