//! Descriptors of transports: name, platforms and requirements, by which `select.rs` chooses one before it is started.

use std::fmt;

use super::AnyTransport;
use crate::device::Platform;
use crate::error::Cause;

/// A transport, as `select.rs` sees it. Most fields have the value that they have in [`Descriptor::DEFAULT`].
pub struct Descriptor {
    /// The value of `MPI4JAX_TRANSPORT` that chooses it.
    pub name: &'static str,
    /// Whether it takes arrays on a platform.
    pub takes: fn(Platform) -> bool,
    /// The platform whose arrays it carries where nothing is chosen.
    pub default_on: Option<Platform>,
    /// The value of `MPI4JAX_USE_CUDA_MPI` that chooses it.
    pub use_cuda_mpi: Option<bool>,
    /// Reads the transport's own settings, and returns what `transport_info` adds of them to the
    /// reason for the choice. Called once, even if another transport is chosen, so that an invalid
    /// setting is always reported. `is_auto` is true if the user leaves the choice to mpi4jax.
    pub settings: fn(is_auto: bool) -> Result<Option<String>, Cause>,
    /// Whether it could start on this rank, or why not. Communicates nothing, and starts nothing.
    pub probe: fn(Platform) -> Result<(), String>,
    /// Starts it, or says why it cannot. Called once for a platform that it takes.
    pub start: fn(Platform) -> Result<AnyTransport, String>,
    /// Whether all ranks of `MPI_COMM_WORLD` start it together, at import. Others are started when a program first needs them.
    pub is_collective: bool,
    /// Whether `auto` may choose it for arrays on GPUs, as far as this rank can say. Collective over `MPI_COMM_WORLD`. None:
    /// `auto` never does.
    pub suits: Option<fn() -> Result<bool, Cause>>,
    /// Whether its operations match the operations of other ranks that go through MPI. If not, all
    /// ranks have to choose it.
    pub meets_mpi: bool,
    /// Why its messages do not match the program's own messages that go through MPI, if so.
    pub messages_apart: fn() -> Option<&'static str>,
    /// Whether XLA packs ghost cells for it also on the CPU, because the processor does not reach the blocks.
    pub takes_packed: bool,
}

impl Descriptor {
    /// The values of most transports.
    pub const DEFAULT: Self = Self {
        name: "",
        takes: |_| true,
        default_on: None,
        use_cuda_mpi: None,
        settings: |_| Ok(None),
        probe: |_| Ok(()),
        start: |_| Err("it cannot be started".into()),
        is_collective: false,
        suits: None,
        meets_mpi: true,
        messages_apart: || None,
        takes_packed: false,
    };

    /// The descriptor of the transport of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().copied().find(|it| it.name == name)
    }
}

impl PartialEq for Descriptor {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Descriptor {}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
