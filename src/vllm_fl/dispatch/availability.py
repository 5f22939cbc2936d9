from fl_dispatch.availability import *
