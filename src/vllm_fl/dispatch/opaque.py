from fl_dispatch.compiled.views import *
