from fl_dispatch.settings import *
