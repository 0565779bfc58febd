// Run two rollouts with E2B's SDK (`npm install e2b`): node examples/e2b_agent.mjs [proxy's URL]
// Both begin with the same calls. The second rollout is answered from the tree until it makes a call of its own.
const proxy = process.argv[2] ?? 'http://127.0.0.1:8700'
process.env.E2B_API_URL = process.env.E2B_SANDBOX_URL = `${proxy}/t/e2b-example-js/e2b`
process.env.E2B_API_KEY = 'e2b_' + '0'.repeat(40)
const { Sandbox } = await import('e2b')

for (const name of ['first', 'second']) {
  const box = await Sandbox.create()
  await box.files.write('/root/notes', 'shared\n')
  const drawn = await box.commands.run('echo $RANDOM | tee /root/drawn')
  // From here on the rollouts differ.
  await box.commands.run(`echo ${name} >>/root/notes`)
  const read = await box.commands.run('cat /root/notes /root/drawn')
  console.log(`${name}: drawn ${drawn.stdout.trim()}, read ${read.stdout.trim().split('\n')}`)
  await box.kill()
}
