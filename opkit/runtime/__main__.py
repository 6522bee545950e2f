"""Print the compiler flags for programs that run saved models: ``cc main.c $(python -m opkit.runtime)``."""

from opkit.runtime.library import path


def main() -> None:
    """Print where the headers and the library are, as flags."""
    folder = path().parent
    headers = [folder / "include"]
    if not (headers[0] / "opkit.h").exists():  # in the wheel of opkit it is with those of kernels
        headers.append(folder.parent / "kernels" / "include")
    flags = [*(f"-I{each}" for each in headers), f"-L{folder}", f"-Wl,-rpath,{folder}", "-lopkit_model"]
    print(" ".join(flags))


if __name__ == "__main__":
    main()
