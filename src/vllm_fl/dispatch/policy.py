from fl_dispatch.policy import *
