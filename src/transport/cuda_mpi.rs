//! Whether the MPI library takes pointers to the memory of a GPU.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::device;
use crate::mpilib::{CudaSupport, cuda_support};

/// How long a trial may take: it starts Python and MPI.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks the MPI library, and where it cannot say, tries it.
pub(super) fn probe() -> Result<(), String> {
    device::support()?;
    match cuda_support() {
        _ if device::is_reached_from_cpu() => Ok(()),
        CudaSupport::Yes => Ok(()),
        CudaSupport::No => Err("the MPI library says that it is not CUDA-aware: use staged or nccl".into()),
        CudaSupport::Unknown => trial(),
    }
}

/// What starts a Python that tries it: `[python, arguments...]`.
static TRIAL: OnceLock<Vec<String>> = OnceLock::new();

pub fn set_trial(command: Vec<String>) {
    TRIAL.get_or_init(|| command);
}

/// Sends a message between two buffers on the GPU in another process, which may crash.
fn trial() -> Result<(), String> {
    static RESULT: OnceLock<Result<(), String>> = OnceLock::new();
    let refuse = |why: &str| {
        Err(format!("the MPI library does not say whether it is CUDA-aware, and {why}: use staged or nccl"))
    };
    let run = || {
        let Some([python, arguments @ ..]) = TRIAL.get().map(Vec::as_slice) else {
            return refuse("there is no way to try it");
        };
        let mut command = Command::new(python);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // A job of its own, of one process.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPIR_"].iter().any(|p| text.starts_with(p)) {
                command.env_remove(&name);
            }
        }
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return refuse(&format!("a trial could not be started ({error})")),
        };
        let until = Instant::now() + PATIENCE;
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return refuse(&format!("a trial failed ({status})")),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                Ok(None) | Err(_) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return refuse("a trial did not end");
                }
            }
        }
    };
    RESULT.get_or_init(run).clone()
}
