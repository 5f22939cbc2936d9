from fl_dispatch.builder import *
