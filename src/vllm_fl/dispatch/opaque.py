from fl_dispatch.opaque import *
