"""The default model learns real images, as fast as it should."""

from support import python, records, succeeded

FLAGS = ["--dataset", "fashion-mnist", "--device", "cpu", "--batch-size", 128, "--max-steps", 200]
