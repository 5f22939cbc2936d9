from fl_dispatch.selection_policy import *
