// One rollout of an agent that uses E2B's own JavaScript SDK: argv says how it parts; the URLs are in E2B's own
// variables. Prints how many answers are shared, then all, as the agent sees them.
import { Sandbox } from 'e2b'

const LOOP = 'drawn=$RANDOM$RANDOM; while read -r line </work/ask; do echo $line $drawn >/work/told; done'

async function told(ask) {
  try {
    const answer = await ask()
    if (answer === undefined) return null
    if (answer?.exitCode !== undefined) return { stdout: answer.stdout, stderr: answer.stderr, exitCode: answer.exitCode }
    return Array.isArray(answer) ? answer.map((one) => one?.name ?? one) : (answer?.path ?? answer)
  } catch (error) {
    const { exitCode, stdout, stderr } = error.result ?? error
    return { raised: error.constructor.name, ...(exitCode === undefined ? { message: error.message } : { exitCode, stdout, stderr }) }
  }
}

const part = process.argv[2]
const box = await Sandbox.create({ metadata: { part }, envs: { TEAM: 'blue' } })
const run = (command, options) => told(() => box.commands.run(command, options))
let heard = ''
const answers = [
  await run('mkdir /work; mkfifo /work/ask /work/told; cd /work; echo shared >notes'),
  await run('echo $RANDOM$RANDOM | tee /work/drawn'),
  await run('pwd; cat notes; echo $TEAM $MORE; whoami', { cwd: '/work', envs: { MORE: 'more' }, user: 'root' }),
  await run('echo out; echo err >&2; exit 7'),
  await run('for i in 1 2 3; do echo $i; sleep 0.05; done', { onStdout: (data) => { heard += data } }),
  heard,
  await told(() => box.files.write('/work/a.txt', 'a text')),
  await told(() => box.files.write([{ path: '/work/c', data: '1' }, { path: '/work/d/e', data: '2' }])),
  await told(() => box.files.read('/work/a.txt')),
  await told(() => box.files.read('/work/none')),
  await told(() => box.files.list('/work')),
  await told(() => box.files.exists('/work/none')),
  await told(() => box.files.makeDir('/work/new')),
  await told(() => box.files.rename('/work/c', '/work/new/c')),
  await told(() => box.files.remove('/work/d')),
]
let said
const first = new Promise((resolve) => { said = resolve })
const server = await box.commands.run(LOOP, { background: true, timeoutMs: 0 })
answers.push(await run('echo first >/work/ask; cat /work/told'))
const reader = await box.commands.run('while read -r line; do echo got $line; done', {
  background: true, stdin: true, timeoutMs: 0, onStdout: said,
})
await box.commands.sendStdin(reader.pid, 'one\n')
answers.push(await first, await told(() => reader.kill()), await told(() => reader.wait()))
const shared = answers.length
answers.push(
  await run(`echo ${part} >/work/part; cat /work/part /work/drawn`),
  await run(`echo ${part} >/work/ask; cat /work/told`),
  await told(() => box.files.read('/work/part')),
  await told(() => server.kill()),
  await told(() => box.commands.list()),
  await run('cat /work/new/c; ls /work'),
)
await box.kill()
console.log(JSON.stringify([shared, answers]))
process.exit(0)
