//! DevX objects, and errors of commands.

use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use rdma_core_sys::Mlx5;
use rdma_core_sys::mlx5::mlx5dv_devx_obj;

use super::mailbox::{Command, Opcode, Status};
use crate::Open;
use gdsync_device::error::{Error, Result};

/// Advice for devices without DevX.
pub(super) const NO_DEVX: &str = "queues in GPU memory need DevX: a kernel whose mlx5_ib has it (CONFIG_INFINIBAND_USER_ACCESS, Linux 4.19), \
     firmware with user contexts (`mlxconfig -d DEVICE set UCTX_EN=1`, then a reset of the card), and in a container \
     or guest a function that may use them; or leave the queues in host memory (OnGpu::empty())";

/// A completion queue or queue pair of the firmware, destroyed on drop.
pub(super) struct Object {
    open: Arc<Open>,
    mlx5: &'static Mlx5,
    /// `None` after destruction.
    raw: Option<NonNull<mlx5dv_devx_obj>>,
    what: &'static str,
}

// SAFETY: libmlx5 is thread-safe.
unsafe impl Send for Object {}
// SAFETY: libmlx5 is thread-safe.
unsafe impl Sync for Object {}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.open.name())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl Object {
    /// Creates an object. Also returns the answer.
    pub(super) fn create(
        open: &Arc<Open>,
        mlx5: &'static Mlx5,
        what: &'static str,
        command: &Command,
    ) -> Result<(Self, Vec<u8>)> {
        let mut answer = vec![0; command.answer];
        let (input, output) = (command.bytes(), answer.as_mut_slice());
        // SAFETY: the device is open, and both buffers have the given lengths.
        let raw = unsafe {
            mlx5.mlx5dv_devx_obj_create(
                open.context().as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        let Some(raw) = NonNull::new(raw) else {
            let errno = last_errno();
            return Err(refused("mlx5dv_devx_obj_create", open, command.opcode, &answer, errno));
        };
        Ok((Self { open: open.clone(), mlx5, raw: Some(raw), what }, answer))
    }

    /// Destroys the object. Returns false if the card refuses.
    pub(super) fn destroy(&mut self) -> bool {
        let Some(raw) = self.raw.take() else { return true };
        // SAFETY: created here, destroyed only here.
        let errno = unsafe { self.mlx5.mlx5dv_devx_obj_destroy(raw.as_ptr()) };
        if errno != 0 {
            tracing::error!(object = ?self, errno, "an object of DevX was not destroyed");
        }
        errno == 0
    }

    pub(super) fn raw(&self) -> *mut mlx5dv_devx_obj {
        self.raw.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    /// Runs a modify command.
    pub(super) fn modify(&self, command: &Command) -> Result<()> {
        let mut answer = vec![0; command.answer];
        let (input, output) = (command.bytes(), answer.as_mut_slice());
        // SAFETY: the object lives until `self` is dropped, and both buffers have the given lengths.
        let errno = unsafe {
            self.mlx5.mlx5dv_devx_obj_modify(
                self.raw(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        self.check("mlx5dv_devx_obj_modify", command, &answer, errno)
    }

    /// Runs a query command. Returns the answer.
    pub(super) fn query(&self, command: &Command) -> Result<Vec<u8>> {
        let mut answer = vec![0; command.answer];
        let (input, output) = (command.bytes(), answer.as_mut_slice());
        // SAFETY: the object lives until `self` is dropped, and both buffers have the given lengths.
        let errno = unsafe {
            self.mlx5.mlx5dv_devx_obj_query(
                self.raw(),
                input.as_ptr().cast(),
                input.len(),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        self.check("mlx5dv_devx_obj_query", command, &answer, errno)?;
        Ok(answer)
    }

    fn check(&self, call: &'static str, command: &Command, answer: &[u8], errno: i32) -> Result<()> {
        if errno == 0 { Ok(()) } else { Err(refused(call, &self.open, command.opcode, answer, errno)) }
    }
}

/// Runs a command for the whole device. Returns the answer.
pub(super) fn ask(open: &Arc<Open>, mlx5: &Mlx5, command: &Command) -> Result<Vec<u8>> {
    let mut answer = vec![0; command.answer];
    let (input, output) = (command.bytes(), answer.as_mut_slice());
    // SAFETY: the device is open, and both buffers have the given lengths.
    let errno = unsafe {
        mlx5.mlx5dv_devx_general_cmd(
            open.context().as_ptr(),
            input.as_ptr().cast(),
            input.len(),
            output.as_mut_ptr().cast(),
            output.len(),
        )
    };
    if errno == 0 {
        return Ok(answer);
    }
    Err(refused("mlx5dv_devx_general_cmd", open, command.opcode, &answer, errno))
}

/// The current `errno`.
pub(super) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().filter(|&errno| errno != 0).unwrap_or(libc::EIO)
}

fn refused(call: &'static str, open: &Open, opcode: Opcode, answer: &[u8], errno: i32) -> Error {
    let status = Status::of(answer);
    let Status { status: code, syndrome } = status;
    Error::Verbs {
        call,
        subject: format!(
            "{} on {} (status {code:#x}, {}; syndrome {syndrome:#x})",
            opcode.name(),
            open.name(),
            status.name()
        ),
        // Some releases return negative numbers.
        source: Arc::new(io::Error::from_raw_os_error(errno.abs())),
        advice: advice(opcode, status, errno.abs()),
    }
}

/// Advice for a refused command.
fn advice(opcode: Opcode, status: Status, errno: i32) -> String {
    let is_create = matches!(opcode, Opcode::CreateCq | Opcode::CreateQp);
    match (status.status, errno) {
        (0, libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EINVAL)
            if opcode == Opcode::QueryHcaCap =>
        {
            NO_DEVX.into()
        }
        (0, libc::EIO | libc::ENODEV) => {
            "the device is gone or in a fatal state: look at `dmesg`, and open it again".into()
        }
        (0, libc::EOPNOTSUPP | libc::ENOSYS) => NO_DEVX.into(),
        (0, libc::EPERM | libc::EACCES) => {
            "the kernel does not let this process send the command: check its access to /dev/infiniband".into()
        }
        (0x08 | 0x0f, _) | (_, libc::ENOMEM | libc::EAGAIN) if is_create => {
            "the card has no more of these: destroy some, also of other processes".into()
        }
        (0x10 | 0x09, _) => {
            "the queue pair is not in the state that this step begins with: a failure may have put it into ERR".into()
        }
        _ => "the firmware does not take this: report the status and syndrome with the firmware's version (`ibv_devinfo`), \
              or leave the queues in host memory (OnGpu::empty())"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_distinct_advice() {
        let told = |opcode, status, errno| advice(opcode, Status { status, syndrome: 0 }, errno);
        assert!(told(Opcode::QueryHcaCap, 0, libc::EOPNOTSUPP).contains("UCTX_EN"));
        assert!(told(Opcode::QueryHcaCap, 0, libc::EINVAL).contains("user contexts"));
        assert!(told(Opcode::CreateQp, 0x08, libc::ENOMEM).contains("no more"));
        assert!(told(Opcode::Init2Rtr, 0x10, libc::EINVAL).contains("state"));
        assert!(told(Opcode::CreateCq, 0x03, libc::EINVAL).contains("syndrome"));
        assert!(told(Opcode::CreateCq, 0, libc::EIO).contains("dmesg"));
    }
}
