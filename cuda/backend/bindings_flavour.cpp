// SPDX-License-Identifier: Apache-2.0
// bindings_flavour.cpp: what ns_mgpu_splat.device asks of the flavour (flavour.h): the same names in both.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/shards.h"
#include "bindings.h"
#if MGPU_CUDA
#include "mesh/late.h"
#endif

namespace mgpu {

namespace {

// An alias for users: aliases know nothing of autograd, and torch refuses to write to such tensors.
at::Tensor with_autograd(const at::Tensor& alias) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(alias.storage()), alias.key_set(), alias.dtype());
  impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  if (alias.is_conj()) impl->_set_conj(true);
  if (alias.is_neg()) impl->_set_neg(true);
  return at::Tensor(std::move(impl));
}

}  // namespace

MGPU_BINDINGS(flavour) {
  namespace py = pybind11;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

#if MGPU_CUDA
  m.attr("flavour") = "cuda";
  m.def("set_late_gpu", &set_late_gpu);  // for tests of the order between GPUs
#else
  m.attr("flavour") = "host";
#endif
  m.def("start", &start_flavour, no_gil);
  m.def("set_parts_merged", &set_parts_merged);
  m.def("part_count", &part_count);

  // the same memory under the other name; no copy, no gradient
  m.def(
      "as_backing",
      [](const at::Tensor& tensor) {
        OperatorScope scope;  // other GPUs' work comes first
        return with_autograd(Aliases().to_backing(tensor.detach()));
      },
      no_gil);
  m.def("from_backing", [](const at::Tensor& tensor) { return Aliases().from_backing(tensor.detach()); });
}

}  // namespace mgpu
