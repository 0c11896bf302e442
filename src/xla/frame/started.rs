//! The frames of what is started and waited for later.

use super::{counts_in, read, side};
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
    let (mut operand, mut handle) = (None, None);
    let (mut given, mut none) = (None, None);
    // SAFETY: promised by the caller; operands have as many numbers as `side` has checked.
    unsafe {
        let arrays = usize::from(layout.has_operand()) + usize::from(site.ragged.is_some());
        let more = side("operand", &frame.args, arrays, &mut operand, (site.operand.len(), &mut given))?;
        if let (Some(ragged), [last]) = (&site.ragged, more) {
            let known = counts_in(*last, ragged, counts)?;
            transport.read_numbers(&known, counts, stream)?;
        }
        side("result", &frame.rets, 1, &mut handle, (0, &mut none))?;
        let mut peers = given.map(|_| Peers::default());
        if let (Some(given), Some(peers)) = (&given, &mut peers) {
            transport.read_numbers(given, peers, stream)?;
        }
        // Without an operand, the first array is that of the counts.
        let operand = operand.filter(|_| layout.has_operand());
        Ok((operand, peers, handle_in("result", handle)?))
    }
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
    let (mut handle, mut first) = (None, None);
    let (mut given, mut none) = (None, None);
    // SAFETY: promised by the caller.
    unsafe {
        side("operand", &frame.args, 1, &mut handle, (operand.len(), &mut given))?;
        let arrays = usize::from(layout.gives.is_some()) + usize::from(layout.keeps);
        let others = side("result", &frame.rets, arrays, &mut first, (0, &mut none))?;
        let second = others.first().map(|&buffer| read(buffer)).transpose()?;
        let results = if layout.gives.is_some() { [first, second] } else { [None, first] };
        let mut bits = [0; HANDLE];
        transport.read_numbers(&handle_in("operand", handle)?, &mut bits, stream)?;
        Ok((bits.map(|bits| f32::from_bits(bits as u32)), results))
    }
}

/// A frame's only result, a handle.
///
/// # Safety
/// `frame` is what XLA passed to the execute stage.
pub unsafe fn handle(frame: &CallFrame) -> Result<Buffer, Cause> {
    let (mut handle, mut none) = (None, None);
    // SAFETY: promised by the caller.
    unsafe { side("result", &frame.rets, 1, &mut handle, (0, &mut none))? };
    handle_in("result", handle)
}

/// A handle, which is an array of float32.
fn handle_in(operand: &'static str, buffer: Option<Buffer>) -> Result<Buffer, Cause> {
    buffer
        .filter(|buffer| (buffer.dtype(), buffer.count()) == (Dtype::Float32, HANDLE))
        .ok_or(Cause::Buffers { operand, expected: 1, actual: 0 })
}
