from typing import Any

def get_tp_group(): ...

class GroupCoordinator:
    world_size: Any
    ranks: Any
    cpu_group: Any
