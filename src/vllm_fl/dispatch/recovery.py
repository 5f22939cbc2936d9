from fl_dispatch.run.recovery import *
