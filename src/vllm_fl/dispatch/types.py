from fl_dispatch.types import *
