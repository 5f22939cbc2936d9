from fl_dispatch.backends import *
