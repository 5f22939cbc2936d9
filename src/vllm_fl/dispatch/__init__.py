from fl_dispatch import *
