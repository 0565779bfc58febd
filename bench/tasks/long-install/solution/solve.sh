#!/bin/bash
tar -tf /work/parts.tar | wc -l

mkdir -p /work/src && tar -xf /work/parts.tar -C /work/src && ls /work/src | wc -l

cat /work/src/Makefile

cd /work/src && make -j2 | tail -n 1

cd /work/src && make install && ls /opt/parts | wc -l

rm -rf /work/src
