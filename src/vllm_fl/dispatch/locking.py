from fl_dispatch.locking import *
