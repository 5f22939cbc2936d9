from fl_dispatch.entries import *
