#!/bin/bash
/usr/bin/python3 --version; ls /work

mkdir -p /work/words && cat > /work/words/__init__.py <<'END'
import re
from collections import Counter


def count(text):
    return Counter(re.findall(r"[a-z]+", text.lower()))
END

cat > /work/words/__main__.py <<'END'
import sys

from words import count

print(count(sys.stdin.read()).most_common(1)[0][0])
END

cd /work && echo 'a B b c' | /usr/bin/python3 -B -m words

cd /work && mkdir -p build && cp -r words build/ && printf 'import runpy\nrunpy.run_module("words", run_name="__main__")\n' > build/__main__.py

cd /work && /usr/bin/python3 -B -m zipapp build -o words.pyz && ls -l words.pyz | cut -c1-10
