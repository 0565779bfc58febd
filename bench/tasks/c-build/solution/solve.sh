#!/bin/bash
ls -la /work/calc && cat /work/calc/Makefile

cd /work/calc && make

cat /work/calc/calc.c

cd /work/calc && sed -i 's/multiply(a, b)/multiply(a, b);/' calc.c && make

cd /work/calc && ./calc 6 7

cd /work/calc && sed -i 's/return a + b/return a * b/' multiply.c && make && ./calc 6 7
