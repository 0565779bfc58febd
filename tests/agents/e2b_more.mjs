// One rollout of an agent that uses what few do of E2B's own JavaScript SDK: terminals, watched directories, polls, ends
// of time. Prints all answers, as the agent sees them.
import { Sandbox } from 'e2b'

async function told(ask) {
  try {
    const answer = await ask()
    return answer === undefined ? null : answer
  } catch (error) {
    return { raised: error.constructor.name, exitCode: (error.result ?? error).exitCode ?? null }
  }
}

async function polled(ask) {
  for (let count = 0; count < 1000; count++) if (await ask()) return true
  return false
}

const box = await Sandbox.create({ timeoutMs: 3600_000 })
const before = (await box.getInfo()).endAt
await box.setTimeout(7200_000)
await box.commands.run('mkdir /work; echo shared >/work/notes')

const reader = await box.commands.run('sleep 0.4; read a; read b; echo $a-$b >/work/read', {
  background: true, stdin: true, timeoutMs: 0,
})
for (let time = 0; time < 2; time++) await box.commands.sendStdin(reader.pid, 'same\n')
await reader.disconnect()
const answers = [
  (await box.getInfo()).endAt > before,
  await polled(() => box.files.exists('/work/read')),
  await told(() => box.files.read('/work/read')),
  await polled(async () => (await box.commands.list()).length === 0),
  await told(() => box.commands.connect(4)),
]

let said = '', hear
const heard = (word) => new Promise((resolve) => { hear = () => { if (said.includes(word)) resolve(true) }; hear() })
const terminal = await box.pty.create({
  rows: 24, cols: 80, cwd: '/work', timeoutMs: 0, onData: (data) => { said += new TextDecoder().decode(data); hear?.() },
})
const type = (text) => box.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
await type('stty size; x=$((40+2))\n')
answers.push(await heard('24 80\r\n'))
await box.pty.resize(terminal.pid, { rows: 30, cols: 100 })
await type('stty size; echo $x$x\n')
answers.push(await heard('30 100\r\n4242\r\n'))
answers.push(await told(() => box.commands.sendStdin(terminal.pid, 'x')))
answers.push(await told(() => box.pty.kill(terminal.pid)), await told(() => terminal.wait()))
answers.push(await told(() => box.pty.kill(terminal.pid)))

const events = []
let happen
const happened = (word) => new Promise((resolve) => {
  happen = () => { if (events.includes(word)) resolve([...events]) }
  happen()
})
const watch = await box.files.watchDir('/work', (event) => { events.push(`${event.type} ${event.name}`); happen?.() })
await box.files.write('/work/new', '1')
answers.push(await happened('write new'))
await box.commands.run('rm /work/new')
answers.push(await happened('remove new'))
await watch.stop()
answers.push(await told(() => box.files.watchDir('/work/none', () => {})))

await box.setTimeout(0)
answers.push(await told(() => box.isRunning()), await told(() => box.commands.run('echo late')))
answers.push(await told(() => box.files.read('/x')), await told(() => Sandbox.getInfo(box.sandboxId)))
answers.push(await told(() => Sandbox.connect(box.sandboxId)), await told(() => box.kill()))
console.log(JSON.stringify(answers))
process.exit(0)
