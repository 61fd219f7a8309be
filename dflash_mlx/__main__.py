"""`python -m dflash_mlx` and the script `dflash-mlx`: the command line, whose own imports may be interrupted or fail too."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends with exit status 130 and no traceback, also before a command has begun."""
    try:
        from .cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ImportError as error:
        from .requirements import explain

        if (said := explain(error)) is None:
            raise
        print(f"Error: {said}.", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        from .serving.interrupt import is_ctrl_c

        if not is_ctrl_c(error):
            raise
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
