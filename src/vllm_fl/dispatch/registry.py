from fl_dispatch.registry import *
