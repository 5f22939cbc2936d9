from fl_dispatch.ops import *
