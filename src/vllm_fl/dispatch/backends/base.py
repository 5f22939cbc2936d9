from fl_dispatch.backends.base import *
