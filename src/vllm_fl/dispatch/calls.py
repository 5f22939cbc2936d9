from fl_dispatch.calls import *
