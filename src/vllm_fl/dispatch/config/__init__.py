from fl_dispatch.config import *
