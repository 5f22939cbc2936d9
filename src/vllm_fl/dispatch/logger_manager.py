from fl_dispatch.logger_manager import *
