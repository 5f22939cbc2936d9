from fl_dispatch.recovery import *
