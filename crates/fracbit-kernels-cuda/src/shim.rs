//! A device made of the host shim, for tests.
//!
//! [`Shim::start`] compiles `kernels/cuda` with the C++ compiler of the machine (objects are kept
//! by the hash of the sources) and runs the result as a process that obeys commands: slow,
//! deterministic, and every access checked.

use crate::{Address, Device, DeviceError, Grid, Limits};
#[path = "sources.rs"]
mod units;

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{BufWriter, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Mutex,
};

/// The process and its pipes.
#[derive(Debug)]
pub struct Shim {
    pipes: Mutex<Pipes>,
    limits: Limits,
    recording: Mutex<Option<Vec<Launched>>>,
}

type Launched = (String, Grid, Vec<u8>);

#[derive(Debug)]
struct Pipes {
    input: BufWriter<ChildStdin>,
    output: ChildStdout,
    child: Child,
}

/// The folder of the device sources.
#[must_use]
pub fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/cuda")
}

fn failed(call: &str, message: impl ToString) -> DeviceError {
    DeviceError::Call { call: call.to_owned(), message: message.to_string() }
}

impl Shim {
    /// Builds in `folder` and starts.
    ///
    /// # Errors
    /// When the C++ compiler is missing or refuses the sources.
    pub fn start(folder: &Path, limits: Limits) -> Result<Self, DeviceError> {
        let program = build(folder).map_err(|e| failed("building the host shim", e))?;
        let child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| failed("starting the host shim", e))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { return Err(failed("shim", "no pipes")) };
        Ok(Self {
            pipes: Mutex::new(Pipes { input: BufWriter::new(input), output, child }),
            limits,
            recording: Mutex::default(),
        })
    }

    fn talk<T>(
        &self,
        call: &str,
        f: impl FnOnce(&mut Pipes) -> std::io::Result<T>,
    ) -> Result<T, DeviceError> {
        let mut pipes = self.pipes.lock().map_err(|e| failed(call, e))?;
        f(&mut pipes).map_err(|e| failed(call, format!("{e}; the shim's message is above")))
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        if let Ok(pipes) = self.pipes.get_mut() {
            // A process that is gone already needs no ending.
            let _ = pipes.input.flush();
            let _ = pipes.child.kill();
            let _ = pipes.child.wait();
        }
    }
}

impl Pipes {
    fn words(&mut self, op: u32, operands: &[u64]) -> std::io::Result<()> {
        self.input.write_all(&op.to_le_bytes())?;
        operands.iter().try_for_each(|o| self.input.write_all(&o.to_le_bytes()))
    }
}

impl Device for Shim {
    type Graph = Vec<Launched>;

    fn limits(&self) -> Limits {
        self.limits
    }

    fn warpgroups(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Address, DeviceError> {
        self.talk(what, |p| {
            p.words(1, &[bytes as u64])?;
            p.input.flush()?;
            let mut at = [0; 8];
            p.output.read_exact(&mut at)?;
            Ok(u64::from_le_bytes(at))
        })
    }

    fn free(&self, at: Address) {
        // Nothing can be done where the process is gone.
        let _ = self.talk("free", |p| p.words(2, &[at]));
    }

    fn write(&self, at: Address, bytes: &[u8]) -> Result<(), DeviceError> {
        self.talk("write", |p| {
            p.words(3, &[at, bytes.len() as u64])?;
            p.input.write_all(bytes)
        })
    }

    fn read(&self, at: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.talk("read", |p| {
            p.words(4, &[at, bytes.len() as u64])?;
            p.input.flush()?;
            p.output.read_exact(bytes)
        })
    }

    fn launch(&self, kernel: &str, grid: Grid, args: &[u8]) -> Result<(), DeviceError> {
        if let Ok(mut recording) = self.recording.lock()
            && let Some(recording) = recording.as_mut()
        {
            recording.push((kernel.to_owned(), grid, args.to_vec()));
            return Ok(());
        }
        self.talk(kernel, |p| {
            p.words(5, &[])?;
            let word = |n: usize| u32::try_from(n).expect("small").to_le_bytes();
            p.input.write_all(&word(kernel.len()))?;
            p.input.write_all(kernel.as_bytes())?;
            for n in [grid.blocks.0, grid.blocks.1, grid.threads, grid.shared] {
                p.input.write_all(&n.to_le_bytes())?;
            }
            // Once to size the buffer, once as the length.
            p.input.write_all(&word(args.len()))?;
            p.input.write_all(&word(args.len()))?;
            p.input.write_all(args)
        })
    }

    fn record(&self, body: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<Self::Graph, DeviceError> {
        *self.recording.lock().map_err(|e| failed("record", e))? = Some(Vec::new());
        let outcome = body();
        let recorded = self.recording.lock().map_err(|e| failed("record", e))?.take();
        outcome?;
        Ok(recorded.unwrap_or_default())
    }

    fn replay(&self, graph: &Self::Graph) -> Result<(), DeviceError> {
        graph.iter().try_for_each(|(kernel, grid, args)| self.launch(kernel, *grid, args))
    }
}

/// Builds the server, two units at a time; returns the program.
fn build(folder: &Path) -> Result<PathBuf, String> {
    let text = |e: std::io::Error| e.to_string();
    let source = sources();
    let host = hash_of(
        ["shim.hpp", "warpgroup.hpp", "registry.hpp", "instances.cpp", "server.cpp"]
            .map(|f| source.join("host").join(f)),
    )?;
    let mut jobs = vec![("host/server.cpp", "server", "", host ^ hash_of([source.join("device.cuh")])?)];
    for (unit, instances) in units::UNITS {
        let hash = units::unit_hash(&source, unit, instances).map_err(text)?;
        jobs.push(("host/instances.cpp", unit, instances, hash ^ host));
    }
    let stamp = jobs.iter().fold(0u64, |all, job| all.rotate_left(7) ^ job.3);
    fs::create_dir_all(folder).map_err(text)?;
    let program = folder.join(format!("shim-{stamp:016x}"));
    // Tests of one build may start together: the first builds, the others wait.
    let lock = fs::File::create(folder.join("shim.lock")).map_err(text)?;
    lock.lock().map_err(text)?;
    if program.exists() {
        return Ok(program);
    }
    let (jobs, objects, failure) = (Mutex::new(jobs), Mutex::new(Vec::new()), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((source, name, instances, hash)) = { jobs.lock().expect("no panic").pop() } {
                    match compile(folder, source, name, instances, hash) {
                        Ok(object) => objects.lock().expect("no panic").push(object),
                        Err(message) => *failure.lock().expect("no panic") = Some(message),
                    }
                }
            });
        }
    });
    if let Some(message) = failure.into_inner().expect("no panic") {
        return Err(message);
    }
    let partial = folder.join("shim.partial");
    run(Command::new("c++").args(objects.into_inner().expect("no panic")).arg("-o").arg(&partial))?;
    fs::rename(partial, &program).map_err(text)?;
    Ok(program)
}

fn hash_of<const N: usize>(files: [PathBuf; N]) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?.hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Compiles one unit, unless an object of the same sources is there.
fn compile(folder: &Path, source: &str, name: &str, instances: &str, hash: u64) -> Result<PathBuf, String> {
    let object = folder.join(format!("shim-{name}-{hash:016x}.o"));
    if object.exists() {
        return Ok(object);
    }
    let partial = object.with_extension("partial");
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-c"]);
    command.arg("-I").arg(sources()).arg(format!("-DFB_UNIT=\"{instances}\""));
    run(command.arg(sources().join(source)).arg("-o").arg(&partial))?;
    fs::rename(partial, &object).map_err(|e| e.to_string())?;
    Ok(object)
}

fn run(command: &mut Command) -> Result<(), String> {
    let out = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}
