"""Run by Python at its start where the tests' environment puts it on the path: MLX gets the tests' device and products."""

import importlib.util
import os
import sys


class DeviceChooser:
    """Finds mlx.core as the others do, loads the products before it and chooses the device after it was run."""

    def find_spec(self, name, path=None, target=None):
        if name != "mlx.core":
            return None
        sys.meta_path.remove(self)
        products = os.environ.get("DFLASH_MLX_TEST_PRODUCTS", "mlx")
        if products != "mlx":
            import ctypes

            ctypes.CDLL(products, ctypes.RTLD_GLOBAL)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.set_default_device(module.Device(getattr(module, os.environ["DFLASH_MLX_TEST_DEVICE"])))

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("DFLASH_MLX_TEST_DEVICE"):
    sys.meta_path.insert(0, DeviceChooser())
