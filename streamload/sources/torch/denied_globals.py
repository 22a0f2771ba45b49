"""Names that can run something. A pickle that mentions one is refused, wherever it stands.

Nothing that a file names is ever imported or called, so the table protects no one who uses
streamload: it keeps a file that was made to harm others from passing for a checkpoint.
"""

from __future__ import annotations

# Whole modules, with all that is below them.
_MODULES = """
    os posix nt posixpath ntpath subprocess _posixsubprocess commands popen2 pty sys shutil
    runpy code codeop importlib _frozen_importlib _frozen_importlib_external imp pkgutil
    zipimport site ctypes _ctypes cffi socket _socket socketserver ssl select selectors
    asyncio multiprocessing threading _thread thread concurrent signal atexit gc inspect
    webbrowser antigravity http httplib urllib urllib2 ftplib smtplib poplib imaplib nntplib
    telnetlib xmlrpc requests httpx aiohttp urllib3 pickle _pickle cPickle pickletools dill
    cloudpickle joblib marshal shelve dbm sqlite3 copyreg copy_reg operator _operator
    functools timeit trace pdb bdb cProfile profile pstats doctest unittest pytest pip
    setuptools distutils pydoc lib2to3 idlelib ensurepip venv platform tempfile fileinput
    linecache zipfile tarfile mmap fcntl resource pwd winreg _winreg msvcrt _winapi yaml hydra
    fire sh plumbum pexpect paramiko fabric invoke docker psutil IPython numba torch.hub
    torch.jit torch.package torch.serialization torch.multiprocessing torch.ops torch._ops
    torch.classes torch._classes torch._dynamo torch._inductor torch.export torch.testing
    torch.fx.graph_module torch.utils.cpp_extension torch.utils.model_zoo
    torch.utils.collect_env torch.distributed.rpc torch.distributed.run
    torch.distributed.launch torch.distributed.elastic numpy.f2py numpy.distutils
    numpy.testing numpy.ctypeslib numpy.lib.npyio numpy.lib._npyio_impl logging.config
    logging.handlers
"""
_DENIED_MODULES = frozenset(_MODULES.split())
# Single names of modules that also hold harmless ones.
_NAMES = {
    "builtins": "eval exec execfile compile open file input raw_input breakpoint globals locals"
    " vars getattr setattr delattr apply reload exit quit map filter help super",
    "torch": "load save compile from_file",
    "torch.storage": "_load_from_bytes",
    "torch._utils": "_import_dotted_name",
    "torch._C": "PyTorchFileReader PyTorchFileWriter import_ir_module ScriptModule",
    "numpy": "load save savez fromfile memmap loadtxt genfromtxt",
    "types": "FunctionType LambdaType CodeType MethodType ModuleType",
    "io": "open open_code FileIO OpenWrapper",
    "_io": "open open_code FileIO",
    "codecs": "open",
    "bz2": "open BZ2File",
    "gzip": "open GzipFile",
    "lzma": "open LZMAFile",
    "pathlib": "*.*",
    "pandas": "read_pickle",
}
_SAFE = frozenset({("copyreg", "_reconstructor"), ("torch.serialization", "_get_layout")})
# Words in the names of functions, whatever the module: load_state_dict_from_url, _open_file, ...
_WORDS = frozenset(
    {"load", "loads", "open", "exec", "eval", "system", "popen", "spawn", "import", "getattr"}
    | {"pretrained", "shell", "subprocess", "memmap"}
)


def is_denied(module: str, name: str) -> bool:
    """True if ``module.name`` can run something, or reaches into what an object is made of."""
    if (module, name) in _SAFE:
        return False
    whole, parts = f"{module}.{name}", name.split(".")
    ends = [at for at, char in enumerate(whole) if char == "."]
    if any(whole[:end] in _DENIED_MODULES for end in (*ends, len(whole))):
        return True
    names = _NAMES.get(module, "").split()
    return (
        parts[0] in names
        or ("*.*" in names and len(parts) > 1)
        or any(part.startswith("__") and part.endswith("__") for part in parts)
        or (parts[-1].islower() and not _WORDS.isdisjoint(parts[-1].split("_")))
    )
