from typing import Any

# Their members come from ggml's headers when the module is built, so no list stands here.
ffi: Any
lib: Any
