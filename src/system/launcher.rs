//! The launcher of this process: `mpiexec`, or its daemon on this host.

use rustix::process::{Pid, getppid};

use super::os;

/// The launcher that this process is a child of, if it is.
pub struct Launcher {
    process: Pid,
    name: String,
}

impl Launcher {
    /// The parent of this process, if it has one of these names.
    pub fn parent(names: &[String]) -> Option<Self> {
        let process = getppid()?;
        let name = os::info(process.as_raw_pid())?.name;
        names.contains(&name).then_some(Self { process, name })
    }

    /// Whether it has ended. Then nothing ends this process where the job ends, and MPI cannot be asked.
    pub fn is_gone(&self) -> bool {
        getppid() != Some(self.process)
    }

    /// As reports name it.
    pub fn name(&self) -> String {
        format!("the launcher ({}, process {})", self.name, self.process)
    }
}
