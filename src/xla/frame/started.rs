//! The frames of what is started and waited for later.

use super::Side;
use crate::call::{Operand, Peers, Site, Stream};
use crate::error::Cause;
use crate::ops::{Buffer, Counts, Dtype};
use crate::transport::{HANDLE, Handle, RequestLayout, Transport};
use crate::xla::c_api::CallFrame;

/// The buffers of a frame that starts an operation: its operand, what an operand says of the peers, and the handle;
/// counts are copied.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage. `transport` reads the memory of its arrays.
pub unsafe fn start(
    frame: &CallFrame,
    site: &Site,
    layout: &RequestLayout,
    counts: &mut Counts,
    transport: &Transport,
    stream: Stream,
) -> Result<(Option<Buffer>, Option<Peers>, Buffer), Cause> {
    let numbers = usize::from(site.ragged.is_some()) + usize::from(!site.operand.is_empty());
    let expected = usize::from(layout.has_operand()) + numbers;
    // SAFETY: promised by the caller.
    let mut operands = unsafe { Side::new("operand", &frame.args, expected)? };
    let operand = if layout.has_operand() { Some(operands.read()?) } else { None };
    if let Some(ragged) = &site.ragged {
        operands.counts(ragged, counts, transport, stream)?;
    }
    let mut peers = None;
    if !site.operand.is_empty() {
        let given = operands.int32s(site.operand.len())?;
        transport.read_numbers(&given, peers.insert(Peers::default()), stream)?;
    }
    // SAFETY: promised by the caller.
    Ok((operand, peers, unsafe { handle(frame)? }))
}

/// The buffers of a frame that waits for one: the handle, and the results.
///
/// # Safety
/// As for `start`.
pub unsafe fn wait(
    frame: &CallFrame,
    operand: Operand,
    layout: &RequestLayout,
    transport: &Transport,
    stream: Stream,
) -> Result<(Handle, [Option<Buffer>; 2]), Cause> {
    let (gives, keeps) = (layout.gives.is_some(), layout.keeps);
    // SAFETY: promised by the caller.
    let (mut operands, mut results) = unsafe {
        let operands = Side::new("operand", &frame.args, 1 + usize::from(!operand.is_empty()))?;
        (operands, Side::new("result", &frame.rets, usize::from(gives) + usize::from(keeps))?)
    };
    let handle = handle_in(&mut operands)?;
    if !operand.is_empty() {
        operands.int32s(operand.len())?;
    }
    let mut result = |is_there: bool| is_there.then(|| results.read()).transpose();
    let results = [result(gives)?, result(keeps)?];
    let mut bits = [0; HANDLE];
    transport.read_numbers(&handle, &mut bits, stream)?;
    Ok((bits.map(|bits| f32::from_bits(bits as u32)), results))
}

/// A frame's only result, a handle.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage.
pub unsafe fn handle(frame: &CallFrame) -> Result<Buffer, Cause> {
    // SAFETY: promised by the caller.
    handle_in(&mut unsafe { Side::new("result", &frame.rets, 1)? })
}

/// A handle, which is an array of float32.
fn handle_in(side: &mut Side) -> Result<Buffer, Cause> {
    let buffer = side.read()?;
    if (buffer.dtype(), buffer.count()) == (Dtype::Float32, HANDLE) {
        return Ok(buffer);
    }
    Err(Cause::Buffers { operand: side.operand, expected: 1, actual: 0 })
}
