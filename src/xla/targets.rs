//! The custom-call targets: one for every operation and kind of call.

use super::Handler;
use super::handler::{execute, instantiate};
use super::{empty, leaves, requests};
use crate::device;
use crate::ops::Op;

/// A custom-call target and its handlers.
pub struct Target {
    pub name: &'static str,
    pub platform: &'static str,
    pub instantiate: Handler,
    pub execute: Handler,
}

/// For results whose shapes are not known when a program is exported: see `Lowering.call` in Python.
const AFTER: &str = "mpi4jax_after";

/// Every target: the CPU's, and the GPUs', which run on the CPU with the tests' driver.
pub fn targets() -> Vec<Target> {
    if device::is_on_cpu() {
        of_platform::<true>("cpu")
    } else {
        let mut targets = of_platform::<false>("cpu");
        targets.extend(of_platform::<true>(device::vendor().xla_platform));
        targets
    }
}

fn of_platform<const GPU: bool>(platform: &'static str) -> Vec<Target> {
    let target = |name: &'static str, instantiate: Handler, execute: Handler| Target {
        name,
        platform,
        instantiate,
        execute,
    };
    let mut targets = vec![
        target(AFTER, requests::after::<GPU>, requests::after::<GPU>),
        target("mpi4jax_start", requests::instantiate::<GPU, true>, requests::start::<GPU>),
        target("mpi4jax_wait", requests::instantiate::<GPU, false>, requests::wait::<GPU>),
        target("mpi4jax_empty", requests::after::<GPU>, empty::empty::<GPU>),
        target("mpi4jax_pack", requests::after::<GPU>, leaves::pack::<GPU>),
        target("mpi4jax_unpack", requests::after::<GPU>, leaves::unpack::<GPU>),
        target("mpi4jax_ready", requests::after::<GPU>, requests::ready::<GPU>),
    ];
    targets.extend(Op::TABLE.iter().map(|row| target(row.target, instantiate::<GPU>, execute::<GPU>)));
    targets
}
