/* Our operations of OpenVINO's graphs, computed on the threads of their stream.

   MaskedAttention, by masked_attention.h
   Inputs: what Q, K and V lie in, float32 or bfloat16, (B, n, columns) or (B, windows, n, columns), 1 to 3 tensors; if `queries`
   is not n, Q lies in (B, queries, columns) or (B, windows, queries, columns). Then the tables of rotation (2 or 3, heads or 1,
   tokens, d), none to 2. Then the mask as the kernel wants it, of
   each head or (1, ...) of all, if `masked`, two of float16 as one int32 (OpenVINO makes float32 of float16); then the
   bias likewise, (windows or 1, heads or 1, ...), if `biased`; then the `mixings` (heads, heads): 2, before and after
   softmax; 1, after softmax; or 0.
   Output: of the type and shape of what Q lies in but for heads * d columns, or int8.
   Attributes: heads, queries, n, d; grid: of the mask's layout; parts: of Q, K and V each the input and its first column;
   rotations: of Q and K each the input with its tables or -1, whether its halves belong together, whether it is normed;
   epsilons: of these norms; scale; arithmetic; steps: those of int8 in 1, or 0 for float32.

   ResidualNorm, by residual_norm.h
   Inputs: x, float32 (B, n, width); then what is added to it if `adds`; weight and bias (width), by the step.
   Outputs: int8 (B, n, width); then the sum if `adds`.

   ProductChain, by product_chain.h
   Inputs: int8 (…, depth of the first product) if a product is first, or float32 if the first step quantises; x, float32
   (…, width), if `width` is not 0; what the first norm adds to x if `adds`; then of each norm its weight and bias, and
   of each product its packed weights, the start of its sums, scale and bias.
   Outputs: the sum, float32 (…, width), if `sums`; int8 (…, width) of a norm that is last; float32 (…, columns) of each
   product that is stored.
   Attributes: of each step `kinds`, as in product_chain.h, `depths` and `columns`, 0 for a norm, `epsilons`, `steps`,
   `zeros`, `slopes` and `cubics`. */

#include "masked_attention.h"
#include "product_chain.h"
#include "residual_norm.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/core/parallel.hpp>
#include <openvino/op/op.hpp>

namespace gmmvit {

template <typename Operation>
std::shared_ptr<ov::Node> copied(const Operation& operation, const ov::OutputVector& inputs) {
    auto copy = std::make_shared<Operation>(operation);
    copy->set_arguments(inputs);
    copy->validate_and_infer_types();
    return copy;
}

/* Divides `pieces` among the threads, of which each calls compute(first, last). Returns an error of a call, or 0. */
template <typename Compute>
int on_all_threads(int64_t pieces, const Compute& compute) {
    std::atomic<int> failed{0};
    ov::parallel_nt(0, [&](const int thread, const int threads) {
        int64_t first = 0, last = 0;
        ov::splitter(pieces, threads, thread, first, last);
        if (first < last)
            if (const int error = compute(first, last)) failed = error;
    });
    return failed;
}

class MaskedAttention : public ov::op::Op {
public:
    OPENVINO_OP("MaskedAttention", "gmmvit");

    MaskedAttention() = default;

    void validate_and_infer_types() override {
        auto shape = get_input_partial_shape(0);
        shape[shape.size() - 2] = m_queries;
        shape[shape.size() - 1] = m_heads * m_d;
        set_output_type(0, m_steps ? ov::element::Type(ov::element::i8) : get_input_element_type(0), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return copied(*this, inputs);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", m_heads);
        visitor.on_attribute("queries", m_queries);
        visitor.on_attribute("n", m_n);
        visitor.on_attribute("d", m_d);
        visitor.on_attribute("grid", m_grid);
        visitor.on_attribute("parts", m_parts);
        visitor.on_attribute("masked", m_masked);
        visitor.on_attribute("biased", m_biased);
        visitor.on_attribute("mixings", m_mixings);
        visitor.on_attribute("rotations", m_rotations);
        visitor.on_attribute("epsilons", m_epsilons);
        visitor.on_attribute("scale", m_scale);
        visitor.on_attribute("arithmetic", m_arithmetic);
        visitor.on_attribute("steps", m_steps);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        ::MaskedAttention what{};
        what.rounded = inputs.at(0).get_element_type() == ov::element::bf16;
        const size_t batch = place(inputs, 0, m_queries, what.q, what.q_row);
        const size_t of_keys = place(inputs, 1, m_n, what.k, what.k_row);
        const size_t of_values = place(inputs, 2, m_n, what.v, what.v_row);
        OPENVINO_ASSERT(of_keys == batch && of_values == batch, "MaskedAttention: Q, K and V are of ", batch, ", ", of_keys,
                        " and ", of_values, " images or windows");
        size_t next = inputs.size() - static_cast<size_t>(m_mixings) - m_biased - m_masked;
        if (m_masked) {
            what.mask_heads = static_cast<int32_t>(inputs.at(next).get_shape().at(0));
            what.mask = inputs.at(next++).data();
        }
        if (m_biased) {
            what.bias_heads = static_cast<int32_t>(inputs.at(next).get_shape().at(1));
            what.windows = static_cast<int32_t>(inputs.at(next).get_shape().at(0));
            what.bias = inputs.at(next++).data<const float>();
        }
        what.before = m_mixings == 2 ? inputs.at(next++).data<const float>() : nullptr;
        what.after = m_mixings ? inputs.at(next).data<const float>() : nullptr;
        what.out = m_steps ? nullptr : outputs.at(0).data();
        what.quantised = m_steps ? outputs.at(0).data<int8_t>() : nullptr;
        what.steps = m_steps;
        what.batch = static_cast<int32_t>(batch);
        what.heads = static_cast<int32_t>(m_heads);
        what.queries = static_cast<int32_t>(m_queries);
        what.n = static_cast<int32_t>(m_n);
        what.d = static_cast<int32_t>(m_d);
        what.arithmetic = static_cast<int32_t>(m_arithmetic);
        what.grid = static_cast<int32_t>(m_grid);
        what.scale = m_scale;
        what.of_queries = rotation(inputs, 0);
        what.of_keys = rotation(inputs, 1);
        const int failed = on_all_threads(masked_attention_pieces(&what), [&](int64_t first, int64_t last) {
            return masked_attention(&what, first, last);
        });
        OPENVINO_ASSERT(failed == 0, "MaskedAttention of ", m_heads, " heads, ", m_d, " wide: ",
                        failed == 2 ? "no memory is left" : "its sizes or its arithmetic are not supported here");
        return true;
    }

private:
    /* Returns how many images or windows of `tokens` tokens this part has. */
    size_t place(const ov::TensorVector& inputs, size_t part, int64_t tokens, const void*& start, int64_t& row) const {
        const auto& tensor = inputs.at(static_cast<size_t>(m_parts.at(2 * part)));
        const auto& shape = tensor.get_shape();
        OPENVINO_ASSERT(shape.size() >= 3 && shape[shape.size() - 2] == static_cast<size_t>(tokens),
                        "MaskedAttention over ", tokens, " tokens got ", shape);
        const auto type = tensor.get_element_type();
        OPENVINO_ASSERT(type == inputs.at(0).get_element_type() && (type == ov::element::f32 || type == ov::element::bf16),
                        "MaskedAttention got Q, K or V in ", type);
        row = static_cast<int64_t>(shape.back());
        start = static_cast<const char*>(tensor.data()) + m_parts.at(2 * part + 1) * type.size();
        return tensor.get_size() / (shape.back() * static_cast<size_t>(tokens));
    }

    ::Rotation rotation(const ov::TensorVector& inputs, size_t part) const {
        ::Rotation of{};
        const int64_t index = m_rotations.at(3 * part);
        if (index < 0) return of;
        const auto& tables = inputs.at(static_cast<size_t>(index));
        of.tables = tables.data<const float>();
        of.shifts = tables.get_shape().at(0) == 3;
        of.heads = static_cast<int32_t>(tables.get_shape().at(1));
        of.halves = static_cast<int32_t>(m_rotations.at(3 * part + 1));
        of.normed = static_cast<int32_t>(m_rotations.at(3 * part + 2));
        of.epsilon = m_epsilons.at(part);
        return of;
    }

    int64_t m_heads = 0, m_queries = 0, m_n = 0, m_d = 0, m_grid = 0, m_mixings = 0, m_arithmetic = 0;
    std::vector<int64_t> m_parts, m_rotations;
    std::vector<float> m_epsilons;
    bool m_masked = false, m_biased = false;
    float m_scale = 1, m_steps = 0;
};

class ResidualNorm : public ov::op::Op {
public:
    OPENVINO_OP("ResidualNorm", "gmmvit");

    ResidualNorm() = default;

    void validate_and_infer_types() override {
        set_output_type(0, ov::element::i8, get_input_partial_shape(0));
        if (m_adds) set_output_type(1, get_input_element_type(0), get_input_partial_shape(0));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return copied(*this, inputs);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("adds", m_adds);
        visitor.on_attribute("epsilon", m_epsilon);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        size_t next = 0;
        ::ResidualNorm what{};
        what.width = static_cast<int64_t>(inputs.at(0).get_shape().back());
        what.x = inputs.at(next++).data<const float>();
        what.branch = m_adds ? inputs.at(next++).data<const float>() : nullptr;
        what.weight = inputs.at(next).data<const float>();
        what.bias = inputs.at(next + 1).data<const float>();
        what.normed = outputs.at(0).data<int8_t>();
        what.sum = m_adds ? outputs.at(1).data<float>() : nullptr;
        what.epsilon = m_epsilon;
        const int64_t rows = static_cast<int64_t>(inputs.at(0).get_size()) / what.width;
        const int failed = on_all_threads(rows, [&](int64_t first, int64_t last) {
            return residual_norm(&what, first, last);
        });
        OPENVINO_ASSERT(failed == 0, "ResidualNorm does not support rows of ", what.width);
        return true;
    }

private:
    bool m_adds = false;
    float m_epsilon = 0;
};

class ProductChain : public ov::op::Op {
public:
    OPENVINO_OP("ProductChain", "gmmvit");

    ProductChain() = default;

    void validate_and_infer_types() override {
        auto shape = get_input_partial_shape(0);
        size_t next = 0;
        const auto returns = [&](const ov::element::Type& type, int64_t columns) {
            shape[shape.size() - 1] = columns;
            set_output_type(next++, type, shape);
        };
        if (m_sums) returns(ov::element::f32, m_width);
        if (m_kinds.back() == CHAIN_NORM) returns(ov::element::i8, m_width);
        for (size_t i = 0; i < m_kinds.size(); i++)
            if (m_kinds[i] == CHAIN_OUT) returns(ov::element::f32, m_columns[i]);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return copied(*this, inputs);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("width", m_width);
        visitor.on_attribute("adds", m_adds);
        visitor.on_attribute("sums", m_sums);
        visitor.on_attribute("kinds", m_kinds);
        visitor.on_attribute("depths", m_depths);
        visitor.on_attribute("columns", m_columns);
        visitor.on_attribute("epsilons", m_epsilons);
        visitor.on_attribute("steps", m_steps);
        visitor.on_attribute("zeros", m_zeros);
        visitor.on_attribute("slopes", m_slopes);
        visitor.on_attribute("cubics", m_cubics);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        size_t in = 0, out = 0;
        ::ProductChain what{};
        const int64_t rows = static_cast<int64_t>(inputs.at(0).get_size() / inputs.at(0).get_shape().back());
        const bool computed = m_kinds[0] == CHAIN_NORM || m_kinds[0] == CHAIN_QUANTISE; /* what is multiplied first */
        what.bytes = !computed ? inputs.at(in++).data<const int8_t>() : nullptr;
        what.values = m_kinds[0] == CHAIN_QUANTISE ? inputs.at(in++).data<const float>() : nullptr;
        what.x = m_width ? inputs.at(in++).data<const float>() : nullptr;
        what.branch = m_adds ? inputs.at(in++).data<const float>() : nullptr;
        what.sum = m_sums ? outputs.at(out++).data<float>() : nullptr;
        what.normed = m_kinds.back() == CHAIN_NORM ? outputs.at(out++).data<int8_t>() : nullptr;
        what.rows = rows;
        what.width = m_width;
        what.widest = std::max(m_width, *std::max_element(m_depths.begin(), m_depths.end()));
        for (size_t i = what.bytes || what.values ? 1 : 0; i < in; i++)
            OPENVINO_ASSERT(inputs.at(i).get_size() == static_cast<size_t>(rows * m_width),
                            "ProductChain of ", rows, " rows got ", inputs.at(i).get_shape());
        std::vector<ChainStep> steps(m_kinds.size());
        for (size_t i = 0; i < steps.size(); i++) {
            auto& step = steps[i];
            step.kind = static_cast<int32_t>(m_kinds[i]);
            if (step.kind != CHAIN_NORM && step.kind != CHAIN_QUANTISE) {
                step.weights = static_cast<const uint8_t*>(inputs.at(in++).data());
                step.start = inputs.at(in++).data<const int32_t>();
            }
            if (step.kind != CHAIN_QUANTISE) {
                step.scale = inputs.at(in++).data<const float>();
                step.bias = inputs.at(in++).data<const float>();
            }
            step.epsilon = m_epsilons[i];
            step.depth = m_depths[i];
            step.columns = m_columns[i];
            step.steps = m_steps[i];
            step.zero = m_zeros[i];
            step.slope = m_slopes[i];
            step.cubic = m_cubics[i];
            step.out = step.kind == CHAIN_OUT ? outputs.at(out++).data<float>() : nullptr;
        }
        what.steps = steps.data();
        what.count = static_cast<int64_t>(steps.size());
        const int failed = on_all_threads(rows, [&](int64_t first, int64_t last) {
            return product_chain(&what, first, last);
        });
        OPENVINO_ASSERT(failed == 0, "ProductChain of ", steps.size(), " steps: ",
                        failed == 2 ? "no memory is left" : "its sizes or this processor are not supported");
        return true;
    }

private:
    bool m_adds = false, m_sums = false;
    int64_t m_width = 0;
    std::vector<int64_t> m_kinds, m_depths, m_columns;
    std::vector<float> m_epsilons, m_steps, m_zeros, m_slopes, m_cubics;
};

}  // namespace gmmvit

OPENVINO_CREATE_EXTENSIONS(
    std::vector<ov::Extension::Ptr>({std::make_shared<ov::OpExtension<gmmvit::MaskedAttention>>(),
                                     std::make_shared<ov::OpExtension<gmmvit::ResidualNorm>>(),
                                     std::make_shared<ov::OpExtension<gmmvit::ProductChain>>()}));
