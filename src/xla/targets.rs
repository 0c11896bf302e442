//! The custom-call targets: one for every operation and kind of call.

use super::Handler;
use super::handler::{execute, instantiate};
use super::requests;
use super::state::kind;
use crate::comm;
use crate::device;
use crate::error::Error;
use crate::ops::Op;
use crate::transport::{self, Features, Platform};
use crate::watch;

/// What XLA is told of.
pub struct Target {
    pub name: String,
    pub platform: &'static str,
    pub instantiate: Handler,
    pub execute: Handler,
}

impl Target {
    fn of<const KIND: u8>(op: &str, suffix: &str, platform: &'static str) -> Self {
        let (instantiate, execute): (Handler, Handler) = (instantiate::<KIND>, execute::<KIND>);
        Self { name: format!("{op}{suffix}"), platform, instantiate, execute }
    }
}

/// What the name of a target for calls that the transport for GPUs does not carry ends in.
const PLAIN: &str = "_plain";
/// What the name of a target for calls that do something on the host each time ends in.
const UNRECORDED: &str = "_unrecorded";

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
        let cpu = (!device::is_on_cpu()).then(|| Target::of::<{ kind::CPU }>(row.target, "", "cpu"));
        cpu.into_iter().chain([
            Target::of::<{ kind::CUDA }>(row.target, "", gpu),
            Target::of::<{ kind::CUDA_PLAIN }>(row.target, PLAIN, gpu),
            Target::of::<{ kind::CUDA_UNRECORDED }>(row.target, UNRECORDED, gpu),
        ])
    });
    let of_cpu = (!device::is_on_cpu()).then(|| of_requests::<{ kind::CPU }>("cpu"));
    // The host waits for streams in these calls: XLA may not record them.
    let of_gpu = of_requests::<{ kind::CUDA_UNRECORDED }>(gpu);
    ops.chain(afters).chain(of_cpu.into_iter().flatten()).chain(of_gpu)
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

/// The target for an operation on arrays on a GPU. Collective over a communicator on which its first operation is
/// carried by a transport that attaches late.
pub fn gpu_target(features: &Features, comm: &str, has_status: bool) -> Result<String, Error> {
    let carried = transport::carries(Platform::Cuda, features)?;
    if carried
        && let Ok(transport) = transport::selected(Platform::Cuda)
        && transport.attaches_late()
    {
        let comm = comm::lookup(comm)?;
        watch::enter(format!(
            "the making of {}'s counterpart of {}, which takes all its ranks,",
            transport.name(),
            comm.key
        ));
        let attached = transport.attach(&comm);
        watch::leave();
        attached?;
    }
    let suffix = if !carried {
        PLAIN
    } else if has_status {
        UNRECORDED
    } else {
        ""
    };
    Ok(format!("{}{suffix}", features.op.row().target))
}
