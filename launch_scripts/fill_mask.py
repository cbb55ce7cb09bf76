#!/usr/bin/env python3
"""Ask a pretrained BERT for the word under [MASK], as any program that knows `transformers` would.

fill_mask.py runs/bert-0001/checkpoints/latest "The value of the [MASK] is returned."
"""

import sys

from transformers import logging, pipeline

logging.set_verbosity_error()
logging.disable_progress_bar()
folder, *sentences = sys.argv[1:]
fill_mask = pipeline("fill-mask", model=folder, device="cpu")
for sentence in sentences:
    print(sentence)
    for guess in fill_mask(sentence):
        print(f"    {guess['score']:6.1%}  {guess['token_str']}")
