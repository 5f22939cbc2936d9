from fl_dispatch.device import *
