from fl_dispatch.snapshot import *
