"""What a Python program can tell Rigel: which thread is which client, when a request begins and ends, and when to keep out of it.

    import rigel

    def serve(requests):
        with rigel.client("serve", class_="high"):
            for item in requests:
                with rigel.request():
                    model(item).cpu()

    @rigel.client("train", class_="best-effort")
    def train(): ...

Under ``rigel launch`` (or ``rigel run``) this module is on PYTHONPATH, so nothing has to be installed; ``python -I`` and ``-E`` do not
look there. In a program that runs without Rigel everything here does nothing. It needs nothing but ctypes: the functions are those
of native/rigel.h in the preloaded librigel.so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import inspect
import os
import sys
import threading
import warnings
from typing import Any, Callable, Literal, TypeVar

__all__ = ["active", "bypass", "client", "report_request", "request", "request_coming", "shutdown"]

Class = Literal["high", "best-effort"]
_F = TypeVar("_F", bound=Callable[..., Any])


def _library() -> ctypes.CDLL | None:
    """The preloaded librigel.so, through the names of the program itself; None without it, or with an older one."""
    names = ctypes.CDLL(None)
    try:
        names.rigel_client_enter.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        names.rigel_client_enter.restype = ctypes.c_int
        names.rigel_client_stream.argtypes = [ctypes.c_void_p]
        names.rigel_client_stream.restype = ctypes.c_int
        names.rigel_report_request.argtypes = [ctypes.c_uint64]
        names.rigel_bypass_begin.restype = ctypes.c_int
        for function in (
            names.rigel_bypass_end,
            names.rigel_client_leave,
            names.rigel_report_request,
            names.rigel_request_begin,
            names.rigel_request_coming,
            names.rigel_request_end,
            names.rigel_shutdown,
        ):
            function.restype = None
    except AttributeError:
        return None
    return names


_rigel = _library()
_here = threading.local()


def active() -> bool:
    """Whether this process runs under Rigel."""
    disabled = os.environ.get("RIGEL_DISABLE", "0") not in ("", "0")
    return _rigel is not None and bool(os.environ.get("RIGEL_SEGMENT")) and not disabled


class _Around(contextlib.ContextDecorator):
    """A context manager that also decorates functions, each call entering anew. Not for what runs in pieces between others."""

    def __call__(self, function: _F) -> _F:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"rigel: {function.__name__} is a coroutine or generator, which shares its thread with others; "
                "use the context manager around what it launches"
            )

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return around  # type: ignore[return-value]

    def __enter__(self) -> Any:
        raise NotImplementedError

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        raise NotImplementedError


class client(_Around):
    """The calling thread is the client ``name`` inside the ``with`` block, or while the decorated function runs.

    It has counts, requests, a class and a limit of launches in flight of its own. Threads that enter the same name are the same
    client; what else the thread starts (other threads) is not in it. Work is the client's by its stream first, whichever
    thread launches it: so the backward pass, which PyTorch runs in threads that all share, counts for the client whose forward
    pass it belongs to, if the client has a stream of its own.

    name: at most 63 bytes, none of them control characters.
    class_: "high" or "best-effort"; without it, the class that the process was launched with.
    stream: what PyTorch uses as current stream inside. Without it, a stream of the client's own for each thread and device, if torch
        is imported and has CUDA (on the thread's current device: call torch.cuda.set_device first); a torch.cuda.Stream; or
        False: none, the current stream stays.
    wait: the stream waits for what the surrounding one has queued, and at the end the surrounding one for the stream, so that
        tensors can go in and out. False where a client is entered often and shares nothing: waiting ties the clients together that
        come from the same surrounding stream.

    The same object may be used again, by several threads at once, and inside itself.
    """

    def __init__(self, name: str, class_: Class | None = None, *, stream: Any = None, wait: bool = True) -> None:
        encoded = name.encode()
        if not encoded or len(encoded) > 63 or any(byte < 0x20 or byte == 0x7F for byte in encoded):
            raise ValueError(f"rigel: a client's name has 1 to 63 bytes and no control characters, got {name!r}")
        if class_ not in (None, "high", "best-effort"):
            raise ValueError(f'rigel: class_ is "high" or "best-effort", got {class_!r}')
        self.name = name
        self.class_ = class_
        self._stream = stream
        self._wait = wait

    def __enter__(self) -> client:
        entered = _entered()
        if not active() or _rigel is None:
            entered.append(None)
            return self
        # PyTorch makes all the streams of its pool with the first: before the client is there, so that they are nobody's.
        stream = _own_stream(self.name) if self._stream is None else self._stream or None
        result = _rigel.rigel_client_enter(self.name.encode(), self.class_ and self.class_.encode())
        if result != 0:
            if result != -errno.ENODEV:
                warnings.warn(f"rigel: cannot enter client {self.name}: {_reason(result)}", RuntimeWarning, stacklevel=2)
            entered.append(None)
            return self
        exits = contextlib.ExitStack()
        exits.callback(_rigel.rigel_client_leave)
        if stream is not None:
            try:
                _rigel.rigel_client_stream(stream.cuda_stream)
                exits.enter_context(_current(stream, self._wait))
            except BaseException:
                exits.close()
                raise
        entered.append(exits)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        exits = _entered().pop()
        if exits is not None:
            exits.close()


class request(_Around):
    """One request, or one iteration: what is inside the ``with`` block, or one call of the decorated function.

    Its time counts for the thread's client and is shown instead of the busy periods of the GPU that Rigel sees. It should end
    when the result is there: PyTorch returns from most calls before the GPU has done them. One that raises is not counted. Inside,
    clients may be entered that have requests of their own; one of the same client takes the place of the one around it.
    """

    def __enter__(self) -> request:
        if _rigel is not None:
            _rigel.rigel_request_begin()
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if _rigel is not None and kind is None:
            _rigel.rigel_request_end()


class bypass(_Around):
    """What this process asks of the GPU inside the ``with`` block goes to the driver as if Rigel were not there.

    To measure what Rigel costs within one process::

        for item in requests:
            with rigel.bypass() if random.random() < 0.5 else contextlib.nullcontext():
                model(item).cpu()

    It holds for all threads of the process, until the last block is left. Meanwhile nothing is counted and no request reported, what the
    cuBLAS guard would have repaired fails, and no other client makes way. Memory is accounted and limited as ever. A process with a
    best-effort client, or under a policy that holds high clients back, or that is being recorded, may not: it goes on through Rigel,
    with a warning. ``with rigel.bypass() as past:`` says whether it was let (also False without Rigel, or before CUDA is initialised).
    """

    def __enter__(self) -> bool:
        result = _rigel.rigel_bypass_begin() if _rigel is not None else -errno.ENODEV
        if result not in (0, -errno.ENODEV):
            warnings.warn(f"rigel: cannot bypass Rigel: {_why_no_bypass(result)}", RuntimeWarning, stacklevel=2)
        _bypasses().append(result == 0)
        return result == 0

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if _bypasses().pop() and _rigel is not None:
            _rigel.rigel_bypass_end()


def report_request(seconds: float) -> None:
    """One request of the thread's client has ended after so many seconds, as the program itself measures it."""
    if _rigel is not None and seconds >= 0:
        _rigel.rigel_report_request(int(seconds * 1e9))


def request_coming() -> None:
    """A request has come in, and what it has the GPU do is launched within a millisecond, best in 0.15 ms or so.

    For servers whose requests are CUDA graphs, beside best-effort work in time slices. The GPU takes 0.14 ms to come over from another process. It does
    so while the program decodes what it got::

        data = connection.recv(n)
        rigel.request_coming()
        graph_input.copy_(decode(data), non_blocking=True)
        graph.replay()

    Where launches come later than that, or not at all, Rigel does it more and more rarely. Reports nothing, and needs no end.
    """
    if _rigel is not None:
        _rigel.rigel_request_coming()


def shutdown() -> None:
    """Ends Rigel's part in this process for good. Optional: it happens at exit by itself."""
    if _rigel is not None:
        _rigel.rigel_shutdown()


def _entered() -> list[contextlib.ExitStack | None]:
    if not hasattr(_here, "entered"):
        _here.entered = []
    return _here.entered


def _bypasses() -> list[bool]:
    """For each block around, innermost last, whether it was let."""
    if not hasattr(_here, "bypasses"):
        _here.bypasses = []
    return _here.bypasses


def _why_no_bypass(result: int) -> str:
    return {
        -errno.EPERM: "the process has a best-effort client, or the policy holds high clients back",
        -errno.EBUSY: "the process is being recorded",
    }.get(result, os.strerror(-result))


def _reason(result: int) -> str:
    return {
        -errno.EINVAL: "it has no class, and the process was launched with none",
        -errno.EEXIST: "there is a client of this name and the other class",
        -errno.ENOSPC: "all client slots are taken",
        -errno.EOVERFLOW: "this thread has entered 16 clients",
        -errno.EAGAIN: "the program has no key for thread data left (pthread_key_create)",
    }.get(result, os.strerror(-result))


# PyTorch gives streams out of a pool of 32 for each device, round and round. Whose each is: its client and how many threads use it.
_POOL = 32
_owners: dict[tuple[int, int], tuple[str, int]] = {}
_owners_lock = threading.RLock()  # a lease may be collected while another is made


class _Lease:
    """A stream of PyTorch's pool that is no other client's, until the thread that has it ends."""

    _key: tuple[int, int] | None = None

    def __init__(self, torch: Any, name: str, device: int) -> None:
        with _owners_lock:
            for _ in range(2 * _POOL):
                self.stream = torch.cuda.Stream()
                key = (device, self.stream.cuda_stream)
                owner, threads = _owners.get(key, (name, 0))
                if owner == name:
                    break
            _owners[key] = (owner, threads + 1)
            self._key = key
        if owner != name:
            warnings.warn(
                f"rigel: all {_POOL} streams of PyTorch's pool are other clients'; {name} shares one, and what is launched "
                "on it counts for who entered last (give clients streams of their own: rigel.client(..., stream=...))",
                RuntimeWarning,
                stacklevel=4,
            )

    def __del__(self) -> None:
        with _owners_lock:
            owner, threads = _owners.pop(self._key, ("", 0)) if self._key else ("", 0)
            if threads > 1:
                _owners[self._key] = (owner, threads - 1)


def _own_stream(name: str) -> Any:
    """The stream of this client, thread and device; None without PyTorch or a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_available():
        return None
    if not hasattr(_here, "streams"):
        _here.streams = {}
    key = (name, torch.cuda.current_device())
    if key not in _here.streams:
        _here.streams[key] = _Lease(torch, *key)
    return _here.streams[key].stream


@contextlib.contextmanager
def _current(stream: Any, wait: bool) -> Any:
    torch = sys.modules["torch"]
    around = torch.cuda.current_stream(stream.device)
    if wait:
        stream.wait_stream(around)
    with torch.cuda.stream(stream):
        yield
    if wait:
        around.wait_stream(stream)
