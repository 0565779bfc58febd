#!/bin/bash
cd /work/repo && git log --oneline --all --graph --format=%s

cd /work/repo && git checkout -q feature && cat greeting.txt

cd /work/repo && git rebase main || git status --short

cd /work/repo && cat greeting.txt

cd /work/repo && cat > greeting.txt <<'END'
hello from main

hello from feature
END
sed -i '/^$/d' greeting.txt

cd /work/repo && git add greeting.txt && GIT_EDITOR=true git rebase --continue

cd /work/repo && git log --format=%s && git status --short
