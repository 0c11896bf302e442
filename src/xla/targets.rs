//! The custom-call targets: one for every operation and kind of call.

use super::Handler;
use super::handler::{execute, instantiate};
use super::requests;
use super::state::kind;
use crate::device;
use crate::ops::Op;

/// What XLA is told of.
pub struct Target {
    pub name: String,
    pub platform: &'static str,
    pub instantiate: Handler,
    pub execute: Handler,
}

impl Target {
    fn of<const KIND: u8>(op: &str, platform: &'static str) -> Self {
        let (instantiate, execute): (Handler, Handler) = (instantiate::<KIND>, execute::<KIND>);
        Self { name: op.into(), platform, instantiate, execute }
    }
}

/// For results whose shapes are not known when a program is exported: see `Lowering.call` in Python.
const AFTER: &str = "mpi4jax_after";

/// Every target.
pub fn targets() -> impl Iterator<Item = Target> {
    let gpu = if device::is_on_cpu() { "cpu" } else { "CUDA" };
    let platforms = ["cpu", gpu].into_iter().take(if device::is_on_cpu() { 1 } else { 2 });
    let afters = platforms.map(|platform| Target {
        name: AFTER.into(),
        platform,
        instantiate: requests::after,
        execute: requests::after,
    });
    let ops = Op::TABLE.iter().flat_map(move |row| {
        let cpu = (!device::is_on_cpu()).then(|| Target::of::<{ kind::CPU }>(row.target, "cpu"));
        cpu.into_iter().chain([Target::of::<{ kind::CUDA }>(row.target, gpu)])
    });
    let of_cpu = (!device::is_on_cpu()).then(|| of_requests::<{ kind::CPU }>("cpu"));
    ops.chain(afters).chain(of_cpu.into_iter().flatten()).chain(of_requests::<{ kind::CUDA }>(gpu))
}

/// Those of requests, for all operations.
fn of_requests<const KIND: u8>(platform: &'static str) -> [Target; 3] {
    let target = |name: &str, instantiate: Handler, execute: Handler| {
        let name = format!("mpi4jax_{name}");
        Target { name, platform, instantiate, execute }
    };
    [
        target("start", requests::instantiate::<KIND, true>, requests::start::<KIND>),
        target("wait", requests::instantiate::<KIND, false>, requests::wait::<KIND>),
        target("ready", requests::after, requests::ready::<KIND>),
    ]
}
