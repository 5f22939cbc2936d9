from fl_dispatch.builtin_ops import *
