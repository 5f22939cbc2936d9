from fl_dispatch.selection.selection_policy import *
