from fl_dispatch.selection import *
