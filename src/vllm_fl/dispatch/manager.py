from fl_dispatch.manager import *
