from fl_dispatch.replaced import *
